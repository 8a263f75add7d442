"""Devices that are not here: target and draft that take stated times and agree as often as stated."""
