"""The weights of a split model: who holds them, their gradients, and gathering them."""
