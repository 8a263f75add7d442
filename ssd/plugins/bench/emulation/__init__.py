"""Emulation of devices and models that are not here: given times of forwards, given agreement of target and draft."""
