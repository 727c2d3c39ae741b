"""The operations a model is made of. `reference` is the meaning of each, in plain torch."""
