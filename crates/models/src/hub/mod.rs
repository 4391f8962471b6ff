#[derive(Debug, thiserror::Error)]
pub enum HubError {}
