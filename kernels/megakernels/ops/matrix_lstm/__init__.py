"""mLSTM: a matrix state per head with exponential input gates, forget gates, and a normaliser."""
