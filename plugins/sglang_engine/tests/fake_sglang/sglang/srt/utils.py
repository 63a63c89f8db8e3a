"""How the pretended SGLang makes bytes of tensors."""

import pickle


class MultiprocessingSerializer:
    """Copies; the real one shares memory."""

    @staticmethod
    def serialize(tensors):
        """Return bytes of named tensors."""
        return pickle.dumps([(name, tensor.float().numpy().copy()) for name, tensor in tensors])
