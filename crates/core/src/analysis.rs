//! Placeholder until the analyser lands.
