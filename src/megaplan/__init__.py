"""megaplan: what each GPU of a training run will hold, and where to cut the model into pipeline stages."""

__version__ = "0.1.0"
