"""The screen of `ssd top`: pure functions from figures to what rich draws."""
