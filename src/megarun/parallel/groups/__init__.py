"""Process groups and collectives of TP, EP and CP, the CP relay of recurrent states, and ownership of tensor parts."""
