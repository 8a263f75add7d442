"""The target process: truth lives here (contract C1)."""
