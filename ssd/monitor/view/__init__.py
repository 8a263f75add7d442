"""How `ssd top` looks: pure functions from figures to what rich draws."""
