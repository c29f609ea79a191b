"""Mixture of experts: `router.py` chooses experts, `experts.py` computes them."""
