"""Where saved bytes live. The only package that creates streams and pinned memory."""
