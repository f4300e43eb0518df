"""Process groups and collectives of TP, EP and CP, the CP relay of recurrent states, and which part of a tensor a rank owns."""
