"""Pictures and traces of what a run did."""
