"""The 8-bit AdamW of other frameworks beside fp8_adamw, on the same gradients."""
