"""Job files for clusters: `job` describes a run, `engines` writes the file that starts it and hands it over."""
