//! Authentication of relayed requests, with limits on failures per client address.

use std::cell::RefCell;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use gw_base::clock::Timestamp;
use gw_base::error::Error;
use gw_base::service::rate::Rate;
use gw_interface::auth::{self, Authenticated};
use gw_interface::rate_limit::{AddressKey, ClientLimits, Exhausted};
use gw_shared::http::Fields;
use gw_store::{Directory, Service};

use super::Relay;
use crate::request_scope::{RequestScope, Stage};

/// Failed authentications per client address. Each worker counts the requests that it answers.
pub(crate) struct AuthFailures {
    failures: RefCell<ClientLimits<AddressKey>>,
    /// Tokens with a wrong signature: the failures that cost a signature check.
    forgeries: RefCell<ClientLimits<AddressKey>>,
}

impl AuthFailures {
    pub(crate) fn new(rate: Rate) -> Self {
        Self {
            failures: RefCell::new(ClientLimits::new(rate)),
            forgeries: RefCell::new(ClientLimits::new(rate)),
        }
    }
}

impl Relay {
    /// Authenticates the caller of `service`.
    ///
    /// An address with too many failures is told that it is limited instead of the reason. Valid
    /// credentials are accepted nevertheless: a client cannot lock out others behind its address.
    /// Only unverified tokens from an address that sent forged ones have to wait, because each
    /// costs a signature check.
    pub(super) fn authenticate(
        &self,
        scope: &RequestScope,
        directory: &Directory,
        service: &Arc<Service>,
        headers: &Fields,
    ) -> Result<Authenticated, Error> {
        let AuthFailures {
            failures,
            forgeries,
        } = &self.auth_failures;
        let authenticated = {
            let may_verify = || may_verify(forgeries, scope.client);
            let tokens = &mut self.tokens.borrow_mut();
            let checks = auth::Checks {
                directory,
                issuer: &self.issuer,
                service,
                now: Timestamp::now,
                may_verify,
            };
            auth::authenticate(checks, tokens, headers)
        };
        scope.note(Stage::Authenticated(
            authenticated
                .as_ref()
                .ok()
                .map(|authenticated| &authenticated.by),
        ));
        authenticated.map_err(|error| {
            if !error.is_failed_authentication() {
                return error;
            }
            if error == Error::TokenForged {
                // Counted here; enforced before the next signature check.
                let _ = forgeries.borrow_mut().take(scope.client, Instant::now());
            }
            let mut failures = failures.borrow_mut();
            match failures.take(scope.client, Instant::now()) {
                Ok(()) => error,
                Err(exhausted) => limited(failures.rate(), exhausted),
            }
        })
    }
}

fn may_verify(forgeries: &RefCell<ClientLimits<AddressKey>>, client: IpAddr) -> Result<(), Error> {
    let mut forgeries = forgeries.borrow_mut();
    match forgeries.is_exhausted(client, Instant::now()) {
        None => Ok(()),
        Some(exhausted) => Err(limited(forgeries.rate(), exhausted)),
    }
}

fn limited(rate: Rate, exhausted: Exhausted) -> Error {
    Error::AuthRateLimited {
        rate,
        retry_after: exhausted.until_one,
    }
}
