"""What is read and changed inside a pass: specs, interventions, and the taps that apply them."""
