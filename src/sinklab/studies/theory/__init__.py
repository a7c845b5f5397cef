"""Theory: bounds and exact results that studies and claims check; tensors in, tensors out."""
