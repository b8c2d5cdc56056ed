"""What a program takes: memory, time per layer, its HLO, and the flags of its compiler."""
