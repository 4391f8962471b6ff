//! The program as a process: starting, refusing to start, logging, stopping.

mod command_line;
mod configuration;
mod hardening;
mod logs;
mod models;
mod quickstart;
mod stopping;
