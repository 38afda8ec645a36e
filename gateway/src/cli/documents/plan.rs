//! Changes that make a gateway equal to its documents. No I/O.

use std::collections::{BTreeMap, BTreeSet};

use gw_shared::config::did_you_mean;
use gw_shared::id::AgentId;
use http::Method;
use serde_json::{Map, Value};

use super::existing::{Existing, GatewayObjects, NamedAgent};
use super::object::{MANAGED_BY, ObjectId, ObjectKind, SERVICE};
use super::parse::{Declared, Mistake, Place};
use super::read::{Declarations, declared_twice};

/// Changes in the order in which they are made.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) changes: Vec<PlannedChange>,
    /// Objects that are as declared.
    pub(super) unchanged: usize,
    /// Agents that are declared and have not enrolled, each with the suggestion of a name.
    pub(super) absent: Vec<(ObjectId, Place, String)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Create,
    Change,
    Delete,
}

impl Operation {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Change => "change",
            Self::Delete => "delete",
        }
    }
}

/// A change of one object.
#[derive(Debug)]
pub(super) struct PlannedChange {
    pub(super) operation: Operation,
    pub(super) id: ObjectId,
    /// Method of the request.
    pub(super) method: Method,
    /// Path of the request.
    pub(super) path: String,
    /// Members of the request.
    pub(super) body: Map<String, Value>,
    pub(super) fields: Vec<ChangedField>,
    /// Where the object is declared; `None` for one that is deleted.
    pub(super) place: Option<Place>,
}

/// A setting before and after a change; `None` if it is not there.
#[derive(Debug, PartialEq)]
pub(super) struct ChangedField {
    pub(super) name: &'static str,
    pub(super) old: Option<Value>,
    pub(super) new: Option<Value>,
}

/// How documents are applied.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Rules {
    /// Objects with a label of the documents that no document declares are deleted.
    pub(super) prune: bool,
    /// Objects with another label get that of the documents.
    pub(super) take_over: bool,
}

impl Plan {
    /// Numbers of objects that are created, changed and deleted.
    pub(super) fn counts(&self) -> [usize; 3] {
        [Operation::Create, Operation::Change, Operation::Delete].map(|operation| {
            let changes = self.changes.iter();
            changes
                .filter(|change| change.operation == operation)
                .count()
        })
    }
}

/// Plans the changes. Adds what forbids them to `mistakes`.
pub(super) fn plan(
    documents: &Declarations,
    existing: &GatewayObjects,
    rules: Rules,
    mistakes: &mut Vec<Mistake>,
) -> Plan {
    let declared: BTreeSet<&ObjectId> = documents.objects.iter().map(|it| &it.id).collect();
    let domains: BTreeSet<&str> = declared
        .iter()
        .filter(|id| id.kind == ObjectKind::Domain)
        .map(|id| id.name.as_str())
        .collect();
    // A domain that is declared in another account moves there.
    let moves = |id: &ObjectId| id.kind == ObjectKind::Domain && domains.contains(&*id.name);
    let is_pruned = |(id, object): &(&ObjectId, &Existing)| {
        let is_managed = object
            .managed_by()
            .is_some_and(|label| documents.managers.contains(label));
        rules.prune && is_managed && !declared.contains(id) && !moves(id)
    };
    let deleted = existing.objects.iter().filter(is_pruned);
    let mut planner = Planner {
        existing,
        rules,
        deleted: deleted.map(|(id, _)| id).collect(),
        declared,
        agents: BTreeMap::new(),
        mistakes,
        plan: Plan::default(),
    };
    for object in &documents.objects {
        planner.add(object);
    }
    planner.delete();
    planner.plan
}

struct Planner<'a> {
    existing: &'a GatewayObjects,
    rules: Rules,
    declared: BTreeSet<&'a ObjectId>,
    deleted: BTreeSet<&'a ObjectId>,
    /// Agents that are declared, by their ids.
    agents: BTreeMap<&'a ObjectId, &'a Declared>,
    mistakes: &'a mut Vec<Mistake>,
    plan: Plan,
}

impl<'a> Planner<'a> {
    fn add(&mut self, object: &'a Declared) {
        if !self.will_exist(&ObjectId::account(&object.id.account)) {
            let message = self.no_account(&object.id.account);
            return self.report(object, &message);
        }
        self.check_services(object);
        if object.id.kind == ObjectKind::Agent {
            return self.add_agent(object);
        }
        match self.existing.objects.get(&object.id) {
            Some(existing) => self.change(object, existing),
            None => self.create(object),
        }
    }

    fn will_exist(&self, id: &ObjectId) -> bool {
        self.declared.contains(id)
            || self.existing.objects.contains_key(id) && !self.deleted.contains(id)
    }

    /// Objects of a kind that exist or are declared.
    fn known(&self, kind: ObjectKind) -> impl Iterator<Item = &ObjectId> {
        let declared = self.declared.iter().copied();
        let all = self.existing.objects.keys().chain(declared);
        all.filter(move |id| id.kind == kind)
    }

    fn no_account(&self, account: &str) -> String {
        let known = self
            .known(ObjectKind::Account)
            .map(|id| id.account.as_str());
        let hint = did_you_mean(account, known);
        if self.existing.has_account(account) {
            format!("--prune deletes the account {account}; declare it: [[account]] with this id")
        } else if hint.is_empty() {
            format!("there is no account {account}; declare it: [[account]] with this id")
        } else {
            format!("there is no account {account}{hint}")
        }
    }

    /// Reports services that the object names and that will not exist.
    fn check_services(&mut self, object: &Declared) {
        let Some(key) = object.id.kind.services_key() else {
            return;
        };
        let named = match object.settings.get(key) {
            Some(Value::Array(list)) => list.as_slice(),
            Some(one) => std::slice::from_ref(one),
            None => &[],
        };
        for service in named.iter().filter_map(Value::as_str) {
            let id = ObjectId::service(&object.id.account, service);
            if self.will_exist(&id) {
                continue;
            }
            let account = &object.id.account;
            let message = if self.deleted.contains(&id) {
                format!("{key}: --prune deletes service {service}, which no document declares")
            } else {
                let known = self
                    .known(ObjectKind::Service)
                    .filter(|id| id.account == *account)
                    .map(|id| id.name.as_str());
                let hint = did_you_mean(service, known);
                format!("{key}: account {account} has no service {service}{hint}")
            };
            self.report(object, &message);
        }
    }

    fn add_agent(&mut self, object: &'a Declared) {
        let ObjectId { account, name, .. } = &object.id;
        let found = match AgentId::new(name) {
            Ok(_) => self
                .existing
                .objects
                .get_key_value(&object.id)
                .map_or(NamedAgent::None(None), |(id, agent)| {
                    NamedAgent::One(id, agent)
                }),
            Err(_) => self.existing.agent_named(account, name),
        };
        match found {
            NamedAgent::One(id, agent) => {
                if let Some(first) = self.agents.insert(id, object) {
                    return self.report(object, &declared_twice(first, &object.id));
                }
                self.change(object, agent);
            }
            NamedAgent::Several(number) => {
                let message = format!(
                    "{number} agents have this name; say which with id, as `gw-gateway agent list \
                     {account}` shows it"
                );
                self.report(object, &message);
            }
            NamedAgent::None(similar) => {
                let hint = similar.map_or_else(String::new, |name| {
                    format!("; did you mean the agent {name}?")
                });
                self.plan
                    .absent
                    .push((object.id.clone(), object.place.clone(), hint));
            }
        }
    }

    fn create(&mut self, object: &Declared) {
        let ObjectId {
            kind,
            account,
            name,
        } = &object.id;
        let mut settings = object.settings.clone();
        settings.extend(
            object
                .managed_by
                .clone()
                .map(|label| (MANAGED_BY.to_owned(), label.into())),
        );
        let fields = fields(*kind, |key| (None, settings.get(key).cloned()));
        let mut body = settings;
        let names = kind.name_keys().iter();
        body.extend(names.map(|key| ((*key).to_owned(), name.as_str().into())));
        let path = kind.creation(account, &mut body);
        let path = path.and_then(|path| kind.check_new(&body).map(|()| path));
        let path = match path {
            Ok(path) => path,
            Err(error) => {
                return self.report(object, &format!("it is new, and needs more keys: {error}"));
            }
        };
        self.plan.changes.push(PlannedChange {
            operation: Operation::Create,
            id: object.id.clone(),
            method: Method::POST,
            path,
            body,
            fields,
            place: Some(object.place.clone()),
        });
    }

    fn change(&mut self, object: &Declared, existing: &Existing) {
        let label = existing.managed_by();
        let wanted = object.managed_by.as_deref();
        if let Some(other) = label
            && wanted != label
            && !self.rules.take_over
        {
            let message = match wanted {
                Some(wanted) => format!(
                    "managed by {other}, not by {wanted}; leave it to {other}, or take it over \
                     with --take-over"
                ),
                None => format!(
                    "managed by {other}; apply with --managed-by {other} if these are its \
                     documents, or take it over with --take-over"
                ),
            };
            return self.report(object, &message);
        }
        let mut body = Map::new();
        let fields = fields(object.id.kind, |key| {
            let old = existing.view.get(key).filter(|value| !value.is_null());
            let new = match key {
                MANAGED_BY => wanted.map(Value::from),
                _ => match object.settings.get(key) {
                    Some(given) => Some(given.clone()),
                    None => return (None, None),
                },
            };
            (old.cloned(), new)
        });
        for field in &fields {
            let value = field.new.clone().unwrap_or_else(|| "".into());
            body.insert(field.name.to_owned(), value);
        }
        if fields.is_empty() {
            self.plan.unchanged += 1;
            return;
        }
        let (method, path) = match move_of(object, &mut body) {
            Some(path) => (Method::POST, path),
            None => (Method::PATCH, existing.path.clone()),
        };
        self.plan.changes.push(PlannedChange {
            operation: Operation::Change,
            id: object.id.clone(),
            method,
            path,
            body,
            fields,
            place: Some(object.place.clone()),
        });
    }

    /// Plans the deletions, in the reverse order of creation.
    fn delete(&mut self) {
        for id in self.deleted.clone().into_iter().rev() {
            let left = self.left_in(id);
            if !left.is_empty() {
                let account = &id.account;
                self.mistakes.push(Mistake {
                    place: None,
                    message: format!(
                        "{id} cannot be deleted, although no document declares it: it has {}, \
                         which these documents do not manage; delete them first, or declare the \
                         account, or delete all of it with `gw-gateway account delete {account} \
                         --cascade`",
                        left.join(", ")
                    ),
                });
                continue;
            }
            self.plan.changes.push(PlannedChange {
                operation: Operation::Delete,
                id: id.clone(),
                method: Method::DELETE,
                path: self.existing.objects[id].path.clone(),
                body: Map::new(),
                fields: Vec::new(),
                place: None,
            });
        }
    }

    /// What an account that is deleted still has.
    fn left_in(&self, id: &ObjectId) -> Vec<String> {
        if id.kind != ObjectKind::Account {
            return Vec::new();
        }
        let objects = self.existing.of_account(&id.account);
        let left = objects.map(|(id, _)| id);
        let left = left.filter(|id| !self.deleted.contains(id));
        let unnamed = self.existing.unnamed.keys();
        let unnamed = unnamed.filter(|(account, _)| *account == id.account);
        left.map(ToString::to_string)
            .chain(unnamed.map(|(_, kind)| format!("a {} without a name", kind.table())))
            .collect()
    }

    fn report(&mut self, object: &Declared, message: &str) {
        self.mistakes.push(Mistake {
            place: Some(object.place.clone()),
            message: format!("{}: {message}", object.id),
        });
    }
}

/// Path of the request that moves a domain to another service, with the members that it needs.
/// `None` for other changes.
fn move_of(object: &Declared, body: &mut Map<String, Value>) -> Option<String> {
    let ObjectId {
        kind,
        account,
        name,
    } = &object.id;
    if *kind != ObjectKind::Domain || !body.contains_key(SERVICE) {
        return None;
    }
    body.insert("name".to_owned(), name.as_str().into());
    // The domain is added to the other service, without the label that it had.
    let label = object.managed_by.clone();
    body.extend(label.map(|label| (MANAGED_BY.to_owned(), label.into())));
    kind.creation(account, body).ok()
}

/// The settings of a kind that have different values.
fn fields(
    kind: ObjectKind,
    values: impl Fn(&str) -> (Option<Value>, Option<Value>),
) -> Vec<ChangedField> {
    let all = kind.settings().iter().map(|name| {
        let (old, new) = values(name);
        ChangedField { name, old, new }
    });
    all.filter(|field| field.old != field.new).collect()
}

#[cfg(test)]
mod tests;
