"""What the product is tested against, written from the equations and formats instead of its code."""
