"""Job files for clusters: `job` describes a run, `engines` has the text of each engine's file, `submit` hands it over."""
