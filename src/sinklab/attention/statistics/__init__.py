"""Column statistics: sums, entropy and maximum of attention without the matrix."""
