"""The demonstration: the models it starts from, and how it is run and reported."""
