"""What the seam does with forty and more real architectures, at toy size."""
