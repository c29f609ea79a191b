"""Documents and chats to tokens, once."""
