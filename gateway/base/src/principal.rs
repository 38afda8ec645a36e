//! The authenticated originator of a request.

use gw_shared::id::{ClientId, KeyId};

/// The authenticated originator of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Principal {
    /// The client of an access token.
    Client(ClientId),
    /// The service key that the caller sent.
    ServiceKey(KeyId),
    /// Stands for the administrator in replays of requests.
    Admin,
}

impl Principal {
    /// Name of the mode of authentication, as records have it.
    pub fn mode(&self) -> &'static str {
        match self {
            Self::Client(_) => "jwt",
            Self::ServiceKey(_) => "service_key",
            Self::Admin => "admin",
        }
    }

    /// Client id or key id.
    pub fn id(&self) -> Option<&str> {
        match self {
            Self::Client(id) => Some(id.as_str()),
            Self::ServiceKey(id) => Some(id.as_str()),
            Self::Admin => None,
        }
    }
}
