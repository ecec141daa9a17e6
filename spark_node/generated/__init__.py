"""Generated from proto/ by `make proto`; not edited by hand."""
