//! Objects that a gateway has, as its API lists them.

use std::collections::{BTreeMap, BTreeSet};

use gw_shared::config::suggestion;
use serde_json::{Map, Value};

use super::object::{MANAGED_BY, ObjectId, ObjectKind};
use crate::cli::client::api::{Api, ApiError};

/// An object of a gateway.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Existing {
    /// Path in the API.
    pub(super) path: String,
    pub(super) view: Map<String, Value>,
}

/// Objects of a gateway, of some accounts or all.
#[derive(Debug, Default)]
pub(super) struct GatewayObjects {
    /// Agents by their ids.
    pub(super) objects: BTreeMap<ObjectId, Existing>,
    /// Credentials and keys without a name, which no document can name: account, kind, and number
    /// of them.
    pub(super) unnamed: BTreeMap<(String, ObjectKind), usize>,
}

impl Existing {
    pub(super) fn managed_by(&self) -> Option<&str> {
        self.text(MANAGED_BY)
    }

    pub(super) fn text(&self, member: &str) -> Option<&str> {
        self.view.get(member).and_then(Value::as_str)
    }

    /// Whether it is an agent that documents have settings of: one that will not be gone, or is
    /// already.
    pub(super) fn is_lasting_agent(&self) -> bool {
        self.text("status") != Some("revoked") && self.view.get("ephemeral") != Some(&true.into())
    }
}

/// Which agent a name stands for.
#[derive(Debug, PartialEq)]
pub(super) enum NamedAgent<'a> {
    One(&'a ObjectId, &'a Existing),
    Several(usize),
    /// With a similar name of those that exist.
    None(Option<&'a str>),
}

impl GatewayObjects {
    /// Reads the accounts, and the objects in those that `is_wanted` names.
    pub(super) fn read(api: &Api, is_wanted: impl Fn(&str) -> bool) -> Result<Self, ApiError> {
        let mut found = Self::default();
        found.add(api, ObjectKind::Account, "")?;
        let accounts: BTreeSet<String> =
            found.objects.keys().map(|id| id.account.clone()).collect();
        for account in accounts.iter().filter(|account| is_wanted(account)) {
            for kind in ObjectKind::ALL {
                if kind != ObjectKind::Account {
                    found.add(api, kind, account)?;
                }
            }
        }
        Ok(found)
    }

    fn add(&mut self, api: &Api, kind: ObjectKind, account: &str) -> Result<(), ApiError> {
        let collection = kind.collection(account);
        for item in api.list(&collection, &[], None)?.items {
            let view: Map<String, Value> = serde_json::from_value(item)?;
            self.insert(kind, account, view);
        }
        Ok(())
    }

    /// Adds an object of the account `account`, which is not needed for an account itself.
    pub(super) fn insert(&mut self, kind: ObjectKind, account: &str, view: Map<String, Value>) {
        let text = |member| view.get(member).and_then(Value::as_str);
        let id = text(kind.id_member()).unwrap_or_default();
        let path = format!("{}/{id}", kind.collection(account));
        let name = match kind {
            ObjectKind::Credential | ObjectKind::Key => text("name"),
            _ => Some(id),
        };
        let Some(name) = name.map(str::to_owned) else {
            *self.unnamed.entry((account.to_owned(), kind)).or_default() += 1;
            return;
        };
        let account = match kind {
            ObjectKind::Account => &name,
            _ => account,
        };
        let id = ObjectId {
            kind,
            account: account.to_owned(),
            name,
        };
        self.objects.insert(id, Existing { path, view });
    }

    pub(super) fn has_account(&self, account: &str) -> bool {
        self.objects.contains_key(&ObjectId::account(account))
    }

    /// Objects in an account, without the account.
    pub(super) fn of_account<'a>(
        &'a self,
        account: &'a str,
    ) -> impl Iterator<Item = (&'a ObjectId, &'a Existing)> {
        let of_account = move |(id, _): &(&ObjectId, &Existing)| {
            id.account == account && id.kind != ObjectKind::Account
        };
        self.objects.iter().filter(of_account)
    }

    /// Agents of an account that are not revoked.
    fn agents<'a>(
        &'a self,
        account: &'a str,
    ) -> impl Iterator<Item = (&'a ObjectId, &'a Existing)> + 'a {
        let first = ObjectId {
            kind: ObjectKind::Agent,
            account: account.to_owned(),
            name: String::new(),
        };
        let agents = self.objects.range(first..);
        agents
            .take_while(move |(id, _)| id.account == account)
            .filter(|(_, agent)| agent.text("status") != Some("revoked"))
    }

    pub(super) fn agent_named<'a>(&'a self, account: &'a str, name: &str) -> NamedAgent<'a> {
        let mut named = self
            .agents(account)
            .filter(|(_, agent)| agent.text("name") == Some(name));
        match (named.next(), named.count()) {
            (Some((id, agent)), 0) => NamedAgent::One(id, agent),
            (Some(_), others) => NamedAgent::Several(others + 1),
            (None, _) => {
                let names = self.agents(account);
                let names = names.filter_map(|(_, agent)| agent.text("name"));
                NamedAgent::None(suggestion(name, names))
            }
        }
    }
}
