"""The screen of `ssd top`: pure functions that turn figures into objects that rich draws."""
