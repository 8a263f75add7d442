"""llama.cpp's door to fill in the middle: `/infill`."""
