"""Predicts memory and step time of a run from its configuration. Never touches a device, except to calibrate."""
