"""Job files for clusters: `job` describes a run, and one module an engine writes the file that starts it."""
