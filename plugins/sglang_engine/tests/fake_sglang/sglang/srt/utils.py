"""Serialization of tensors in the fake SGLang."""

import pickle


class MultiprocessingSerializer:
    """Copies tensors; the real one shares their memory."""

    @staticmethod
    def serialize(tensors):
        """Serialize named tensors."""
        return pickle.dumps([(name, tensor.float().numpy().copy()) for name, tensor in tensors])
