"""Multi-head latent attention (MLA), of DeepSeek-V2, V3 and Kimi K2."""
