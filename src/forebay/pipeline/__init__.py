"""Several microbatches at once: the forward of one hides the communication of another's backward."""
