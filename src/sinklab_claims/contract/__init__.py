"""What a claim is made of: its parts and effects, and the models that it reads."""
