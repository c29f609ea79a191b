"""Multi-token prediction (MTP): modules after the layers that predict the tokens after the next."""
