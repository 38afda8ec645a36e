//! The records of a demo: an account, a service, a credential, a service key and an enrollment
//! token.

use gw_base::page::PageQuery;
use gw_base::service::rate::Rate;
use gw_control_plane::control::records::{
    account, agent, caller_secret, enrollment_token, service,
};
use gw_control_plane::control::{
    AccountChanges, Actor, Control, ControlError, NewAccount, NewCallerSecret, NewEnrollmentToken,
    NewService, SecretKind, ServiceChanges,
};
use gw_shared::id::{ClientId, KeyId};
use gw_shared::identity::secret::Secret;

use super::{ACCOUNT, AGENT, SERVICE};

/// One record of each kind for the demo.
pub(super) struct Seeded {
    pub(super) hostname: String,
    pub(super) client_id: ClientId,
    pub(super) client_secret: String,
    pub(super) service_key: String,
    pub(super) enrollment_token: Secret,
}

impl Seeded {
    /// Creates the records, or reuses those of an earlier demo in the same folder. Secrets are new
    /// each time.
    pub(super) fn new(control: &Control, rate: Rate) -> Result<Self, ControlError> {
        let actor = &Actor::Admin;
        account::create(
            control,
            actor,
            &NewAccount {
                id: ACCOUNT.to_owned(),
                capture_allowed: None,
                domains_max: None,
                managed_by: None,
            },
        )?;
        account::change(
            control,
            actor,
            ACCOUNT,
            &AccountChanges {
                capture_allowed: Some(true),
                domains_max: None,
                managed_by: None,
            },
        )?;
        let burst = Some(rate.burst());
        let refill_per_minute = Some(rate.refill_per_minute());
        let changes = ServiceChanges {
            burst,
            refill_per_minute,
            request_logging: Some(true),
            ..ServiceChanges::default()
        };
        let service = match service::change(control, actor, ACCOUNT, SERVICE, &changes) {
            Err(ControlError::NotFound { .. }) => {
                service::create(
                    control,
                    actor,
                    ACCOUNT,
                    &NewService::new(SERVICE.to_owned(), changes),
                )?
                .0
            }
            existing => existing?,
        };
        // Only the demo's own agent: the user may have enrolled others in the same folder.
        for agent in agent::list(control, ACCOUNT, None, &PageQuery::default())?
            .items
            .iter()
            .filter(|agent| agent.name == AGENT)
        {
            agent::delete(control, actor, ACCOUNT, agent.agent_id.as_str())?;
        }
        let credential = fresh_secret::<ClientId>(control)?;
        let key = fresh_secret::<KeyId>(control)?;
        let services = vec![SERVICE.to_owned()];
        let token = NewEnrollmentToken {
            services,
            ..NewEnrollmentToken::default()
        };
        let token = enrollment_token::create(control, actor, ACCOUNT, &token)?;
        Ok(Self {
            hostname: service.hostname,
            client_id: credential.credential.client_id,
            // Always present in a new secret's view.
            client_secret: credential.client_secret.unwrap_or_default(),
            service_key: key.service_key.unwrap_or_default(),
            enrollment_token: Secret::new(token.token),
        })
    }
}

/// A caller secret of the demo, new or rotated.
fn fresh_secret<K: SecretKind>(control: &Control) -> Result<K::NewView, ControlError> {
    let actor = &Actor::Admin;
    let allowed_services = vec![SERVICE.to_owned()];
    let access = NewCallerSecret {
        name: Some(ACCOUNT.to_owned()),
        allowed_services,
        ..NewCallerSecret::default()
    };
    match caller_secret::create::<K>(control, actor, ACCOUNT, &access)? {
        (view, true) => Ok(view),
        (view, false) => {
            caller_secret::rotate::<K>(control, actor, ACCOUNT, K::id_of(&view).borrow())
        }
    }
}
