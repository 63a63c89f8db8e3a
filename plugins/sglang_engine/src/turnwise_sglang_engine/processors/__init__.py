"""Processors of pictures that SGLang imports in its own process (`SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE`)."""
