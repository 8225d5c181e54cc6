"""Tensors of the host beside the virtual GPU: operators on them, which run for real, copies between them and the card, and masks whose values nobody knows."""
