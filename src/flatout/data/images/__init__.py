"""Decoders and resamplers that take the place of those of Pillow."""
