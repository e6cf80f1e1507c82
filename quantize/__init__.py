"""Offline quantization: a checkpoint that the runtime opens in, a compressed-tensors checkpoint out.

May import gptfast; gptfast never imports it.
"""
