"""Pipeline schedules and their runtime, and overlap of two microbatches."""
