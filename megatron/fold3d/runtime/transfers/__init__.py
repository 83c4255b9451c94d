"""PP.sync: transfers of activations and their gradients between pipeline ranks."""
