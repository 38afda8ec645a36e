//! `gw-gateway export`: the objects of a gateway as a document that `apply` reads.

use std::fmt::Write;

use clap::Args;
use gw_shared::command;
use gw_shared::id::{AccountId, ManagerName};
use serde_json::{Map, Value};

use super::existing::{Existing, GatewayObjects, NamedAgent};
use super::object::{ObjectId, ObjectKind};
use super::show::toml_lines;
use crate::cli::client::output::{CommandError, Output};

#[derive(Args)]
pub(crate) struct ExportArguments {
    /// Only this account and what it has.
    #[arg(long)]
    account: Option<AccountId>,
    /// Only objects with this label.
    #[arg(long, value_name = "NAME")]
    managed_by: Option<ManagerName>,
}

impl ExportArguments {
    pub(crate) fn run(self, output: &mut Output) -> Result<(), CommandError> {
        let wanted = self.account.as_ref().map(AccountId::as_str);
        let is_wanted = |account: &str| wanted.is_none_or(|wanted| account == wanted);
        let mut gateway = GatewayObjects::read(&output.api, is_wanted)?;
        if let Some(account) = wanted
            && !gateway.has_account(account)
        {
            // Fails with the message of the API, which suggests a similar one.
            let path = format!("/accounts/{account}");
            output.api.request(http::Method::GET, &path)?;
        }
        gateway.objects.retain(|id, _| is_wanted(&id.account));
        let label = self.managed_by.as_ref().map(ManagerName::as_str);
        let tables = tables(&gateway, label);
        for ((account, kind), number) in &gateway.unnamed {
            let kind = kind.table();
            command::note(
                "gw-gateway",
                format_args!(
                    "not exported: {number} of the kind {kind} in account {account} without a \
                     name; `gw-gateway {kind} change {account} ID --name NAME` gives one"
                ),
            );
        }
        if output.json {
            output.print_json(&json(tables).to_string())
        } else {
            output.write(|out| std::io::Write::write_all(out, text(&tables).as_bytes()))
        }
    }
}

/// A kind, and the keys of an object in their order.
type Table = (ObjectKind, Vec<(&'static str, Value)>);

/// The objects with the label `label`, or all, account by account.
fn tables(gateway: &GatewayObjects, label: Option<&str>) -> Vec<Table> {
    let objects = gateway.objects.iter();
    let mut objects: Vec<(&ObjectId, &Existing)> = objects
        .filter(|(_, object)| label.is_none_or(|label| object.managed_by() == Some(label)))
        .filter(|(id, object)| id.kind != ObjectKind::Agent || object.is_lasting_agent())
        .collect();
    objects.sort_by_key(|(id, object)| {
        // Ids of agents are random.
        let name = object.text("name").filter(|_| id.kind == ObjectKind::Agent);
        (&id.account, id.kind, name, &id.name)
    });
    let table = |(id, object): (&ObjectId, &Existing)| (id.kind, keys(gateway, id, object));
    objects.into_iter().map(table).collect()
}

fn keys(gateway: &GatewayObjects, id: &ObjectId, object: &Existing) -> Vec<(&'static str, Value)> {
    let name = object.text("name").unwrap_or_default();
    let is_unique_agent = || matches!(gateway.agent_named(&id.account, name), NamedAgent::One(..));
    let keys = id.kind.keys().filter_map(|key| {
        let value = match (id.kind, key) {
            (ObjectKind::Agent, "id") if is_unique_agent() => return None,
            (_, "account") => id.account.as_str().into(),
            (_, "id") => id.name.as_str().into(),
            _ => object.view.get(key)?.clone(),
        };
        (!value.is_null()).then_some((key, value))
    });
    keys.collect()
}

fn text(tables: &[Table]) -> String {
    let mut text =
        "# Exported by `gw-gateway export`; `gw-gateway apply -f FILE` applies it.\n".to_owned();
    for (kind, keys) in tables {
        // Writing to a string does not fail.
        let _ = writeln!(text, "\n[[{}]]", kind.table());
        for (key, value) in keys {
            text += &toml_lines(key, value);
        }
    }
    text
}

fn json(tables: Vec<Table>) -> Value {
    let mut lists: Map<String, Value> = Map::new();
    for (kind, keys) in tables {
        let list = lists
            .entry(kind.table())
            .or_insert_with(|| Value::Array(Vec::new()));
        let keys = keys.into_iter();
        let object: Map<String, Value> = keys.map(|(key, value)| (key.to_owned(), value)).collect();
        if let Value::Array(list) = list {
            list.push(object.into());
        }
    }
    lists.into()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::parse::parse;
    use super::super::plan::{Rules, plan};
    use super::super::read::Declarations;
    use super::*;

    /// Two accounts with an object of each kind, an agent whose name is not unique, and agents that
    /// are not exported.
    fn gateway() -> GatewayObjects {
        let mut gateway = GatewayObjects::default();
        for (kind, account, view) in [
            (
                ObjectKind::Account,
                "",
                json!({
                    "id": "acme", "capture_allowed": true, "domains_max": 7, "created_at": "x",
                }),
            ),
            (
                ObjectKind::Account,
                "",
                json!({ "id": "beta", "capture_allowed": false, "managed_by": "git" }),
            ),
            (
                ObjectKind::Service,
                "acme",
                json!({
                    "id": "api", "account": "acme", "hostname": "h", "modes": ["jwt"], "burst": 7,
                    "managed_by": "git",
                }),
            ),
            (
                ObjectKind::Domain,
                "acme",
                json!({
                    "name": "api.customer.example", "account": "acme", "service": "api",
                    "status": "active", "managed_by": "git",
                }),
            ),
            (
                ObjectKind::Key,
                "acme",
                json!({
                    "key_id": "k", "name": "it's \"x\"", "allowed_services": ["api"],
                    "enabled": false,
                }),
            ),
            (
                ObjectKind::Key,
                "acme",
                json!({ "key_id": "u", "name": null, "allowed_services": [], "enabled": true }),
            ),
            (
                ObjectKind::Credential,
                "acme",
                json!({ "client_id": "c", "name": "ci", "allowed_services": [], "enabled": true }),
            ),
        ] {
            gateway.insert(kind, account, view.as_object().unwrap().clone());
        }
        for (number, name, status, ephemeral) in [
            (1, "edge", "approved", false),
            (2, "twin", "approved", false),
            (3, "twin", "pending", false),
            (4, "gone", "revoked", false),
            (5, "pod", "approved", true),
        ] {
            let view = agent(number, name, status, ephemeral);
            gateway.insert(ObjectKind::Agent, "acme", view);
        }
        gateway
    }

    fn agent(number: u8, name: &str, status: &str, ephemeral: bool) -> Map<String, Value> {
        let view = json!({
            "agent_id": format!("ag_{number}123456789abcdefghij"),
            "name": name,
            "services": ["api"],
            "status": status,
            "standby": true,
            "ephemeral": ephemeral,
            "tunnels": [],
        });
        view.as_object().unwrap().clone()
    }

    const EXPORTED: &str = concat!(
        "# Exported by `gw-gateway export`; `gw-gateway apply -f FILE` applies it.\n",
        r#"
[[account]]
id = "acme"
capture_allowed = true
domains_max = 7

[[service]]
account = "acme"
id = "api"
modes = ["jwt"]
burst = 7
managed_by = "git"

[[domain]]
account = "acme"
name = "api.customer.example"
service = "api"
managed_by = "git"

[[credential]]
account = "acme"
name = "ci"
allowed_services = []
enabled = true

[[key]]
account = "acme"
name = "it's \"x\""
allowed_services = ["api"]
enabled = false

[[agent]]
account = "acme"
name = "edge"
services = ["api"]
standby = true

[[agent]]
account = "acme"
id = "ag_2123456789abcdefghij"
name = "twin"
services = ["api"]
standby = true

[[agent]]
account = "acme"
id = "ag_3123456789abcdefghij"
name = "twin"
services = ["api"]
standby = true

[[account]]
id = "beta"
capture_allowed = false
managed_by = "git"
"#
    );

    #[test]
    fn an_export_declares_what_the_gateway_has() {
        let gateway = gateway();
        assert_eq!(text(&tables(&gateway, None)), EXPORTED);
        assert_eq!(gateway.unnamed.len(), 1);
        let of_git: Vec<ObjectKind> = tables(&gateway, Some("git"))
            .iter()
            .map(|(kind, _)| *kind)
            .collect();
        assert_eq!(
            of_git,
            [ObjectKind::Service, ObjectKind::Domain, ObjectKind::Account]
        );

        let mut mistakes = Vec::new();
        let document = parse(&"a.toml".into(), EXPORTED, None, &mut mistakes);
        let documents = Declarations {
            objects: document.objects,
            ..Declarations::default()
        };
        let plan = plan(&documents, &gateway, Rules::default(), &mut mistakes);
        assert_eq!((mistakes, plan.unchanged), (vec![], 9));
        assert!(plan.changes.is_empty(), "{plan:?}");
    }
}
