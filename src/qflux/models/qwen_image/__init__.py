"""Qwen-Image, Qwen-Image-Edit and Qwen-Image-Edit-Plus: three variants of one model."""
