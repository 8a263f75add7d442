"""How a checkpoint is made wider and deeper without changing what it computes."""
