"""PP.sync: activations and their gradients on the way between pipeline ranks."""
