"""What fits, what goes where, and how fast: figures in, plans out. Never touches a device."""
