"""What several experiments share: trained pairs with their texts, and files that grow by a line for each setting."""
