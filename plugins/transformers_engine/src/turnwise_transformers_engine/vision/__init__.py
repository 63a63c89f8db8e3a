"""Vision-language models: all requests run in the decoder of layouts."""
